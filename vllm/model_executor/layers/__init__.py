"""The layers that models are made of: this project's own and out-of-tree ones alike."""
