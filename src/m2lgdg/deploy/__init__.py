"""Take it home: ONNX export, calibration to one site, the local page for one subject."""
