"""Training data: records from files, documents from records, token samples from documents, and the order of samples."""
