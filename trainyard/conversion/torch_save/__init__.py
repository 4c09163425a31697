"""Files of torch.save, read without running what they ask for, and written."""
