"""Devices: copy bytes between the host and memory that only a device reads and writes.

`base` defines what the library needs of a device: streams, events, and host memory that the device reaches by itself.
It imports nothing of CUDA. `cuda` implements it for torch's CUDA tensors, `tieredckpt.testing.devices` for tests.
`drivers` lists the drivers of this process, and `memory` manages the host memory that devices reach.
"""
