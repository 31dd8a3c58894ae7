// What is near the part of the page that is seen.

const MARGIN = "300px";
const hearing = new WeakMap();
const observer = new IntersectionObserver((entries) => {
  for (const {target, isIntersecting, boundingClientRect} of entries) hearing.get(target)(isIntersecting, boundingClientRect.height);
}, {rootMargin: MARGIN});

/** `hear(isNear, height)` whenever a node comes near or goes; not near is what it is told to be until then. */
export function nearby(node, hear) {
  hearing.set(node, hear);
  observer.observe(node);
  return false;
}
