"""Statistics about the use of the engine: kept on this machine if its owner asks for them, never sent."""
