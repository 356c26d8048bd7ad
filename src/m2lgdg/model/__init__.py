"""Trust at a new site: the model folder, out-of-distribution scores, quality flags, new-site calibration."""
