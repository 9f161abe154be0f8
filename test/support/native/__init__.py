"""Programs over the native sources: how they are built, and the step that they share."""
