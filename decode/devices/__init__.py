"""What a device can do, and copies from and to it."""
