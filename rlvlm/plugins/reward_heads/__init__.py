"""Robometer and RynnValue as judges: chat models with heads that answer in numbers."""
