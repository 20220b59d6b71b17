"""What several tests share. Nothing here is a test."""
