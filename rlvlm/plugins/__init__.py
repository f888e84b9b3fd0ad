"""Guests that ship, each in a folder of its own; `core.guests` finds them. The core imports none of them."""
