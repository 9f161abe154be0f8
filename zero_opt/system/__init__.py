"""What the library asks of the machine: threads, Ctrl-C, devices and streams, shared and locked memory."""
