"""Between processes of one engine: frames on a socket pair, types as bytes, how a child starts and ends."""
