"""What can be configured, and how defaults are resolved."""
