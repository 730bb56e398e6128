"""lenspool as a part of other libraries; each of these packages is imported by whoever uses that library."""
