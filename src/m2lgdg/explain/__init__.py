"""Explanations of fitted methods: attributions to ROIs, edges and phenotypes, and maps of network representations."""
