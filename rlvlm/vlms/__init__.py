"""Chat VLMs for judges and policies: loading, processors, chat format and engines."""
