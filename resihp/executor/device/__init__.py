"""What differs between devices, behind one interface: `resihp.executor.device.interface`."""
