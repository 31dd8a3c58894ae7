// Reports which nodes are near the visible part of the page.

const MARGIN = "300px";
const hearing = new WeakMap();
const observer = new IntersectionObserver((entries) => {
  for (const {target, isIntersecting, boundingClientRect} of entries) hearing.get(target)(isIntersecting, boundingClientRect.height);
}, {rootMargin: MARGIN});

/** Calls `hear(isNear, height)` whenever a node comes near or leaves. Returns false, the state until the first call. */
export function nearby(node, hear) {
  hearing.set(node, hear);
  observer.observe(node);
  return false;
}
