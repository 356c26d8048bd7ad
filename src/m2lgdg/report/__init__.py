"""Tables and pages made from the files of a study; nothing here fits or changes a model."""
