"""One table of names and shards, and the ways weights move by it."""
