"""Why does it decide so: attributions to ROIs, edges and phenotypes, and maps of what networks represent."""
