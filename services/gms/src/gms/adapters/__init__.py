"""What touches the machine: devices, sockets, gRPC and the transfer programs."""
