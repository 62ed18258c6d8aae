"""What several kernel families share: descriptors, the launcher, helpers in Gluon."""
