// Reports which nodes are near the visible part of the page.

const MARGIN = "300px";
const callbacks = new WeakMap();
const observer = new IntersectionObserver((entries) => {
  for (const {target, isIntersecting, boundingClientRect} of entries) callbacks.get(target)(isIntersecting, boundingClientRect.height);
}, {rootMargin: MARGIN});

/** Calls `onChange(isNear, height)` when a node comes near or leaves. Returns false, the state until the first call. */
export function nearby(node, onChange) {
  callbacks.set(node, onChange);
  observer.observe(node);
  return false;
}
