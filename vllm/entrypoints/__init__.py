"""How users reach the engine: Python, command line, HTTP."""
