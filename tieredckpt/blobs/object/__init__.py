"""Blob stores over S3, Google Cloud Storage and Azure: `store`, and the kinds of tier that it makes (`kind`).

`client` is the only module that knows obstore, and maps its errors; `throttle` waits where a server asks for it;
`landing` puts what arrives in its place; `probe` finds out what an endpoint honours.
"""
