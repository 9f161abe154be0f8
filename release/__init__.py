"""From a working tree to files that can be uploaded; RELEASE.md says in which order."""
