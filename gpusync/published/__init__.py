"""Published versions, read: the source, the route to a target, the validated chain, the blobs."""
