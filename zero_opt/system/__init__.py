"""What the library asks of the machine: devices and their streams."""
