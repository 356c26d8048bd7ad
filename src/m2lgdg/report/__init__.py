"""Tables, figures and pages from the files of a study or model folder; nothing here fits or changes a model."""
