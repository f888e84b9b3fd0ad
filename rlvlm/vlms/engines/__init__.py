"""Engines that run a chat VLM, one library or provider per file, each imported only if it is used."""
