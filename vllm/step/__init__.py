"""The ground floor: what core, worker and front end say to each other about a step. Nothing here imports torch."""
