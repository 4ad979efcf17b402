"""Who uses the engine. Nothing is collected and nothing is sent."""
