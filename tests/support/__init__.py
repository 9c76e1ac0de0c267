"""What tests share among themselves: stores in temporary folders, trainers to kill, look-alikes of servers."""
