"""The pocket judge: a small Qwen3-VL, and everything that made it. The backend `pocket` loads its folder."""
