"""Attention of packed rows over paged KV: chains by context length, trees and masks by ancestor bits."""
