"""The pocket policy: a small Qwen3-VL that reads the pictures of the worlds in turns and writes their replies."""
