"""What monitor and executor both speak: frames, handshake, messages, clock."""
