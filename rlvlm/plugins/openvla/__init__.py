"""OpenVLA-OFT in modules of our own, with the published checkpoints' weight names."""
