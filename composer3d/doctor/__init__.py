"""Check and measure the devices and the network of a job (``composer3d doctor``)."""
