"""The pocket policy: a small Qwen3-VL that reads the images of the envs in turns and writes their replies."""
