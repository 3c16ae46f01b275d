"""moemesh: mixture-of-experts training over a mesh of devices, planned, shown and explained."""

__version__ = "0.1.0"
