"""Local web page for one subject and one model: upload, answer, web application and server."""
