"""Deployment: ONNX export, calibration to one site, and a local web page for one subject."""
