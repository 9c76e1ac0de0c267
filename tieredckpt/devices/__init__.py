"""Devices: memory that only a device reads and writes, and how its bytes come to the host and back.

`base` says what the library asks of a device: streams, events, and host memory that the device reaches by itself. It
imports nothing of CUDA. `cuda` is that for torch's CUDA tensors, `tieredckpt.testing.devices` a device for tests.
`drivers` knows which there are in this process, `memory` which host memory they reach.
"""
