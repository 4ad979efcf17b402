"""Reading metrics, where the newer API has it."""
