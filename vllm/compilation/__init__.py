"""Public paths of what models from outside the tree say about compilation."""
