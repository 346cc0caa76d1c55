"""Checkpoints in other formats: conversion in both directions, and a start of training."""
