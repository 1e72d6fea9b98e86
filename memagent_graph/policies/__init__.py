"""The policies of this package: on servers, in this process, on chat models, and scripted; and how they are added."""
