"""A local page on which one subject meets one model: what is uploaded, what is answered, and the web around it."""
