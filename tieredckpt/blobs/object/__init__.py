"""Blob stores over S3, Google Cloud Storage and Azure: `store`, and the kinds of tier that it makes (`kind`).

`client` is the only module that uses obstore, and maps its errors. `throttle` waits where a server asks for it. `probe`
finds out which requests an endpoint honours.
"""
