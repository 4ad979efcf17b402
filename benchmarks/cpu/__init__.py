"""The engine on a CPU beside its peers, measured interleaved on one machine."""
