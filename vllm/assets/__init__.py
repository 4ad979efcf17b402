"""Files that come with the package: the demo model and its draft sibling."""
