"""Explanations of fitted methods: attributions to ROIs, edges, phenotypes and regions, and maps of network representations."""
